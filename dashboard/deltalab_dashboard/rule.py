"""The rules as the study ran them: the source that the ledger keeps, and the card."""

import streamlit as st

from deltalab.authoring.card import card
from deltalab.errors import InputError
from deltalab.store import Store, Study
from deltalab_dashboard.chosen import plain, show


def page(store: Store, study: Study) -> None:
    st.title("Rules", anchor=False)
    versions = {f"{version.name} {version.hash[:12]}": version for version in store.rule_versions(study.id)}
    if not versions:
        st.info("No trial is recorded yet.")
        return
    version = versions[st.selectbox("Rule, as this study ran it", list(versions), key="rule", bind="query-params")]
    arms = dict.fromkeys(
        trial.arm for trial in store.trials(study.id) if (trial.rule, trial.rule_hash) == (version.name, version.hash)
    )
    st.caption(plain(f"Arms: {', '.join(arms)}. SHA-256 of the source: {version.hash}"))
    described, source = st.tabs(["Card", "Source"])
    with described:
        try:
            st.markdown(markdown(version.name))
            st.caption("The card is of the rule that is installed here; the source is the one that ran.")
        except Exception as error:  # a plugin may raise anything
            st.info(plain(f"No card: {error if isinstance(error, InputError) else repr(error)}"))
    with source:
        st.code(version.source, language="python", line_numbers=True)


@st.cache_data(show_spinner="Measuring the rule")
def markdown(name: str) -> str:
    return card(name).to_markdown()


if __name__ == "__main__":  # how Streamlit runs a page
    show(page)
