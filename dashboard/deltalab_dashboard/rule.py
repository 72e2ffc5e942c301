"""The rules as the study ran them: their cards, and the sources that the ledger keeps."""

import os

import streamlit as st

from deltalab.authoring.card import card
from deltalab.errors import InputError
from deltalab.registry import add_plugin, rule_plugin
from deltalab.store import RuleVersion, Store, Study
from deltalab_dashboard.chosen import PLUGINS, plain, show


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
    try:
        for file in filter(None, os.environ.get(PLUGINS, "").split(os.pathsep)):
            add_plugin(file)
        here, described = rule_plugin(version.name), markdown(version.name)
    except InputError as error:
        st.info(plain(f"No card: {error}"))
        st.markdown(
            "`platform --plugin FILE dashboard` shows the card of a rule in a file. Below is the recorded source."
        )
        source(version)
        return
    except Exception as error:  # a plugin may raise anything
        st.info(plain(f"No card: the rule raised {error!r}"))
        source(version)
        return
    card_tab, source_tab = st.tabs(["Card", "Source"])
    with card_tab:
        if here.hash == version.hash:
            st.caption(plain(f"The card of {here.file}, whose source is the one that ran."))
        else:
            st.warning(plain(f"The card of {here.file}, which differs from the source that ran."))
        st.markdown(described)
    with source_tab:
        source(version)


def source(version: RuleVersion) -> None:
    st.code(version.source, language="python", line_numbers=True)


@st.cache_data(show_spinner="Measuring the rule")
def markdown(name: str) -> str:
    return card(name).to_markdown()


if __name__ == "__main__":  # how Streamlit runs a page
    show(page)
