"""Differences of evaluated models, item by item."""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "training_comparison",
        sa.Column("training_id", sa.Integer(), nullable=False),
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("step", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("reference", sa.String(), nullable=False),
        sa.Column("reference_step", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("is_log", sa.Boolean(), nullable=False),
        sa.Column("difference", sa.Double(), nullable=False),
        sa.Column("low", sa.Double(), nullable=False),
        sa.Column("high", sa.Double(), nullable=False),
        sa.Column("p", sa.Double(), nullable=False),
        sa.Column("items", sa.Integer(), nullable=False),
        sa.Column("family", sa.Integer(), nullable=False),
        sa.ForeignKeyConstraint(
            ["training_id"], ["training.id"], name="fk_training_comparison_training_id", ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint(
            "training_id", "name", "step", "reference", "reference_step", name="pk_training_comparison"
        ),
    )


def downgrade() -> None:
    op.drop_table("training_comparison")
