"""The dashboard: pages of Streamlit that show the studies of a ledger."""
