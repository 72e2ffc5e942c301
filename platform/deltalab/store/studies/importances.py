"""Keeps the importances of searched settings, which take seconds to compute, in the ledger."""

from collections.abc import Sequence
from typing import Any

from deltalab.store import Store
from deltalab.store.models import Importance
from deltalab.store.outage import waited
from deltalab.store.queries import Ledger


@waited
def kept_shares(store: Ledger, study_id: int, metric: str, computed_from: str) -> list[dict[str, Any]] | None:
    """Returns the shares that were kept for a metric of a study; None if they were computed from something else."""
    with store._reading() as session:
        kept = session.get(Importance, (study_id, metric))
        return kept.shares if kept is not None and kept.computed_from == computed_from else None


@waited
def keep_shares(store: Store, study_id: int, metric: str, computed_from: str, shares: Sequence[dict[str, Any]]) -> None:
    """Keeps the shares of a metric of a study, in place of those that were kept before.

    Raises:
        InputError: The ledger cannot be written.
    """
    with store._writing() as session:
        row = Importance(study_id=study_id, metric=metric, computed_from=computed_from, shares=list(shares))
        session.merge(row)
