"""The page Rule: the source of each rule as the study ran it, and the rule's card."""

import os

import streamlit as st

from deltalab.errors import InputError
from deltalab.store import RuleVersion, Store, Study
from deltalab.store.studies.trials import arms_of_rule
from deltalab_dashboard.frame import PLUGINS, show
from deltalab_dashboard.text import plain

# The page shows the source at first. Making a card loads torch, which takes seconds and 300 MB.
SOURCE, CARD = "source", "card"


def page(store: Store, study: Study) -> None:
    """Draws the page."""
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
        draw_card(version)
    else:
        draw_source(version)


def draw_card(version: RuleVersion) -> None:
    """Draws the card of the installed rule with the version's name.

    If no card can be made, the page says why, and the recorded source is drawn instead.
    """
    from deltalab.registry import add_plugin, rule_plugin

    try:
        for file in filter(None, os.environ.get(PLUGINS, "").split(os.pathsep)):
            add_plugin(file)
        plugin, text = rule_plugin(version.name), card_text(version.name)
    except InputError as error:
        st.info(plain(f"No card: {error}"))
        st.markdown(
            "`deltalab --plugin FILE dashboard` shows the card of a rule in a file. Below is the recorded source."
        )
        draw_source(version)
        return
    except Exception as error:  # A plugin may raise anything.
        st.info(plain(f"No card: the rule raised {error!r}"))
        draw_source(version)
        return
    if plugin.hash == version.hash:
        st.caption(plain(f"The card of {plugin.file}, whose source is the one that ran."))
    else:
        st.warning(plain(f"The card of {plugin.file}, which differs from the source that ran."))
    st.markdown(text)
    st.download_button(
        "Card, Markdown",
        text,
        f"{version.name}.md",
        icon=":material/download:",
        on_click="ignore",
        type="tertiary",
    )


def draw_source(version: RuleVersion) -> None:
    """Draws the rule's source as the ledger recorded it."""
    st.code(version.source, language="python", line_numbers=True)
    st.download_button(
        "Python", version.source, f"{version.name}.py", icon=":material/download:", on_click="ignore", type="tertiary"
    )


@st.cache_data(show_spinner="Measuring the rule")
def card_text(name: str) -> str:
    """Measures a rule, and writes its card in Markdown."""
    from deltalab.authoring.card import card

    return card(name).to_markdown()


if __name__ == "__main__":  # Streamlit runs a page as a script.
    show(page)
