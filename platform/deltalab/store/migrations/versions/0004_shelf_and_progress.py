"""What a reader notes about a study, how many trials it has, and what its drivers do now."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("study", sa.Column("tags", sa.JSON(), nullable=False, server_default="[]"))
    op.add_column("study", sa.Column("notes", sa.String(), nullable=False, server_default=""))
    op.add_column("study", sa.Column("hidden", sa.Boolean(), nullable=False, server_default=sa.false()))
    op.add_column("study", sa.Column("deleted_at", sa.DateTime(timezone=True)))
    op.add_column("study", sa.Column("total", sa.Integer()))
    op.add_column("study", sa.Column("best", sa.JSON()))
    op.add_column("driver", sa.Column("progress", sa.JSON(), nullable=False, server_default="{}"))


def downgrade() -> None:
    op.drop_column("driver", "progress")
    for column in ("best", "total", "deleted_at", "hidden", "notes", "tags"):
        op.drop_column("study", column)
