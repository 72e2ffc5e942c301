"""Views of the dashboard that readers saved by name."""

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "saved_view",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("page", sa.String(), nullable=False),
        sa.Column("study_id", sa.Integer(), nullable=True),
        sa.Column("parameters", sa.JSON(), nullable=False),
        sa.Column("saved_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(["study_id"], ["study.id"], name="fk_saved_view_study_id", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id", name="pk_saved_view"),
        sa.UniqueConstraint("name", name="uq_saved_view_name"),
    )


def downgrade() -> None:
    op.drop_table("saved_view")
