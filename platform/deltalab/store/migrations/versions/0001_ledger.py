"""The first ledger: studies, arms, trials, runs, metrics, rule versions, artifacts."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "study",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("profile", sa.String()),
        sa.Column("identity", sa.String(), nullable=False),
        sa.Column("spec", sa.JSON(), nullable=False),
        sa.Column("state", sa.String(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("finished_at", sa.DateTime(timezone=True)),
        sa.Column("provenance", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_study"),
        sa.UniqueConstraint("identity", name="uq_study_identity"),
    )
    op.create_index("ix_study_name", "study", ["name"])
    op.create_table(
        "rule_version",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("hash", sa.String(), nullable=False),
        sa.Column("source", sa.String(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_rule_version"),
        sa.UniqueConstraint("name", "hash", name="uq_rule_version_name_hash"),
    )
    op.create_table(
        "arm",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("study_id", sa.Integer(), nullable=False),
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("is_base", sa.Boolean(), nullable=False),
        sa.Column("position", sa.Integer(), nullable=False),
        sa.Column("change", sa.JSON(), nullable=False),
        sa.Column("config", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_arm"),
        sa.ForeignKeyConstraint(["study_id"], ["study.id"], name="fk_arm_study_id", ondelete="CASCADE"),
        sa.UniqueConstraint("study_id", "name", name="uq_arm_study_id_name"),
    )
    op.create_table(
        "trial",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("key", sa.String(), nullable=False),
        sa.Column("task", sa.String(), nullable=False),
        sa.Column("task_version", sa.Integer(), nullable=False),
        sa.Column("stage", sa.String(), nullable=False),
        sa.Column("config", sa.JSON(), nullable=False),
        sa.Column("state", sa.String(), nullable=False),
        sa.Column("error", sa.String()),
        sa.Column("started_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("finished_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("seconds", sa.Double(), nullable=False),
        sa.Column("parameters", sa.BigInteger()),
        sa.Column("state_size", sa.BigInteger()),
        sa.Column("tokens_per_second", sa.Double()),
        sa.Column("hardware", sa.JSON(), nullable=False),
        sa.Column("rule_version_id", sa.Integer(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_trial"),
        sa.ForeignKeyConstraint(["rule_version_id"], ["rule_version.id"], name="fk_trial_rule_version_id"),
        sa.UniqueConstraint("key", name="uq_trial_key"),
    )
    op.create_index("ix_trial_rule_version_id", "trial", ["rule_version_id"])
    op.create_table(
        "arm_trial",
        sa.Column("arm_id", sa.Integer(), nullable=False),
        sa.Column("trial_id", sa.Integer(), nullable=False),
        sa.Column("number", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("values", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("arm_id", "trial_id", "number", name="pk_arm_trial"),
        sa.ForeignKeyConstraint(["arm_id"], ["arm.id"], name="fk_arm_trial_arm_id", ondelete="CASCADE"),
        sa.ForeignKeyConstraint(["trial_id"], ["trial.id"], name="fk_arm_trial_trial_id", ondelete="CASCADE"),
    )
    op.create_index("ix_arm_trial_trial_id", "arm_trial", ["trial_id"])
    op.create_table(
        "run",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("trial_id", sa.Integer(), nullable=False),
        sa.Column("seed", sa.BigInteger(), nullable=False),
        sa.Column("state", sa.String(), nullable=False),
        sa.Column("diverged_at", sa.Integer()),
        sa.PrimaryKeyConstraint("id", name="pk_run"),
        sa.ForeignKeyConstraint(["trial_id"], ["trial.id"], name="fk_run_trial_id", ondelete="CASCADE"),
        sa.UniqueConstraint("trial_id", "seed", name="uq_run_trial_id_seed"),
    )
    op.create_table(
        "metric",
        sa.Column("run_id", sa.Integer(), nullable=False),
        sa.Column("split", sa.String(), nullable=False),
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("step", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("value", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("run_id", "split", "name", "step", name="pk_metric"),
        sa.ForeignKeyConstraint(["run_id"], ["run.id"], name="fk_metric_run_id", ondelete="CASCADE"),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "artifact",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("run_id", sa.Integer(), nullable=False),
        sa.Column("kind", sa.String(), nullable=False),
        sa.Column("path", sa.String(), nullable=False),
        sa.Column("sha256", sa.String(), nullable=False),
        sa.Column("bytes", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_artifact"),
        sa.ForeignKeyConstraint(["run_id"], ["run.id"], name="fk_artifact_run_id", ondelete="CASCADE"),
    )
    op.create_index("ix_artifact_run_id", "artifact", ["run_id"])


def downgrade() -> None:
    for table in ("artifact", "metric", "run", "arm_trial", "trial", "arm", "rule_version", "study"):
        op.drop_table(table)
