"""Trainings of exported folders, and their metrics."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "training",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("run", sa.String(), nullable=False),
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("study", sa.String()),
        sa.Column("arm", sa.String()),
        sa.Column("rule", sa.String(), nullable=False),
        sa.Column("parameters", sa.BigInteger()),
        sa.Column("tokens_per_step", sa.BigInteger(), nullable=False),
        sa.Column("started_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("about", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_training"),
        sa.UniqueConstraint("run", name="uq_training_run"),
    )
    op.create_index("ix_training_study", "training", ["study"])
    op.create_table(
        "training_metric",
        sa.Column("training_id", sa.Integer(), nullable=False),
        sa.Column("split", sa.String(), nullable=False),
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("step", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("value", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("training_id", "split", "name", "step", name="pk_training_metric"),
        sa.ForeignKeyConstraint(
            ["training_id"], ["training.id"], name="fk_training_metric_training_id", ondelete="CASCADE"
        ),
        sqlite_with_rowid=False,
    )


def downgrade() -> None:
    op.drop_table("training_metric")
    op.drop_table("training")
