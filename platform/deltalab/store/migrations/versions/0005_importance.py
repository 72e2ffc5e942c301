"""How much each searched setting explains, computed once."""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "importance",
        sa.Column("study_id", sa.Integer(), nullable=False),
        sa.Column("metric", sa.String(), nullable=False),
        sa.Column("computed_from", sa.String(), nullable=False),
        sa.Column("shares", sa.JSON(), nullable=False),
        sa.ForeignKeyConstraint(["study_id"], ["study.id"], name="fk_importance_study_id", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("study_id", "metric", name="pk_importance"),
    )


def downgrade() -> None:
    op.drop_table("importance")
