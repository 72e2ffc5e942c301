"""The pages, each named as its title. Streamlit itself would make pages of a folder `pages` beside `app.py`."""
