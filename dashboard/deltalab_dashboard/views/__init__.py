"""The pages, a module each. Were the folder called `pages`, Streamlit would add its files to the navigation itself."""
