"""The dashboard: Streamlit pages that show the studies of a ledger."""
