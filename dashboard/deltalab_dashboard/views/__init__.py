"""The pages, each named as its title. Streamlit would take a folder `pages` beside `app.py` for pages of its own."""
