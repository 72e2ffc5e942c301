"""Measures how often two equal arms differ, if a single seed chooses the learning rates of each arm.

xz -dc benchmarks/ledgers/found_rules_h100.db.xz > lab.db; python benchmarks/one_choice.py lab.db pre_state_sgla:gpu

An arm whose runs are all recorded stands for both arms. Each of the two draws a seed, which chooses k rates, and draws
the seeds of the test with replacement. Each seed of the test chooses among the k rates by validation.
docs/decisions/210 has the result.
"""

import sys
from itertools import product

import numpy as np

from deltalab.store import Store
from deltalab.study.answers.recorded_scores import scores_by_task

SEEDS, REPEATS = 9, 400


def main(ledger: str, study: str) -> None:
    """Prints the share of false verdicts for each task and each k."""
    signs = np.array(list(product((1, -1), repeat=SEEDS)))
    random = np.random.default_rng(0)
    with Store.open(ledger, create=False) as store:
        tables = scores_by_task(store, store.study(study))
    for task, table in tables.items():
        most = max(len(runs) for runs in table.runs.values())
        arms = {arm: runs for arm, runs in table.runs.items() if len(runs) == most}
        print(f"{task}: {len(arms)} arms, {most} rates, {SEEDS} seeds, {REPEATS} repeats an arm")
        for k in range(1, most + 1):
            shares = []
            for arm, runs in arms.items():
                seeds = table.seeds[arm]
                validation = np.array([[runs[n][seed].validation for seed in seeds] for n in sorted(runs)])
                test = np.array([[runs[n][seed].test for seed in seeds] for n in sorted(runs)])
                validation = validation if table.maximize else -validation

                def drawn(validation: np.ndarray = validation, test: np.ndarray = test, k: int = k) -> np.ndarray:
                    chooser, *test_seeds = random.integers(validation.shape[1], size=1 + SEEDS)
                    kept = np.argsort(-validation[:, chooser], kind="stable")[:k]
                    return test[kept[validation[np.ix_(kept, test_seeds)].argmax(0)], test_seeds]

                verdicts = 0
                for _ in range(REPEATS):
                    sums = np.abs(signs @ (drawn() - drawn()))
                    verdicts += (sums >= sums[0] - 1e-12).mean() <= 0.05
                shares.append(verdicts / REPEATS)
            print(f"k {k}: {np.mean(shares):.3f} false verdicts, {min(shares):.3f} to {max(shares):.3f} of one arm")


if __name__ == "__main__":
    main(*sys.argv[1:])
