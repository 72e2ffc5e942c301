"""The rules as the study ran them: their cards, and the sources that the ledger keeps."""

import os

import streamlit as st

from deltalab.errors import InputError
from deltalab.store import RuleVersion, Store, Study
from deltalab.store.trials import arms_of_rule
from deltalab_dashboard.frame import PLUGINS, show
from deltalab_dashboard.text import plain

SOURCE, CARD = "source", "card"  # the source first: a card takes seconds and 300 MB, to load torch


def page(store: Store, study: Study) -> None:
    st.title("Rules", anchor=False)
    versions = {f"{version.name} {version.hash[:12]}": version for version in store.rule_versions(study.id)}
    if not versions:
        st.info("No trial is recorded yet.")
        return
    left, right = st.columns([2, 1])
    version = versions[left.selectbox("Rule, as this study ran it", list(versions), key="rule", bind="query-params")]
    part = right.selectbox("Show", [SOURCE, CARD], key="show", bind="query-params")
    st.caption(plain(f"Arms: {', '.join(arms_of_rule(store, study.id, version.id))}."))
    st.caption(plain(f"SHA-256 of the source: {version.hash}"))
    if part == CARD:
        card_of(version)
    else:
        source(version)


def card_of(version: RuleVersion) -> None:
    """The card of the rule that is installed here. Where there is none, says why, and shows the recorded source."""
    from deltalab.registry import add_plugin, rule_plugin

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
    if here.hash == version.hash:
        st.caption(plain(f"The card of {here.file}, whose source is the one that ran."))
    else:
        st.warning(plain(f"The card of {here.file}, which differs from the source that ran."))
    st.markdown(described)
    st.download_button(
        "Card, Markdown",
        described,
        f"{version.name}.md",
        icon=":material/download:",
        on_click="ignore",
        type="tertiary",
    )


def source(version: RuleVersion) -> None:
    st.code(version.source, language="python", line_numbers=True)
    st.download_button(
        "Python", version.source, f"{version.name}.py", icon=":material/download:", on_click="ignore", type="tertiary"
    )


@st.cache_data(show_spinner="Measuring the rule")
def markdown(name: str) -> str:
    from deltalab.authoring.card import card

    return card(name).to_markdown()


if __name__ == "__main__":  # how Streamlit runs a page
    show(page)
