"""Drivers of studies with their heartbeats, and the queue from which joined drivers take stacks."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "driver",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("study_id", sa.Integer(), nullable=False),
        sa.Column("holds", sa.Boolean(), nullable=False),
        sa.Column("host", sa.String(), nullable=False),
        sa.Column("machine", sa.String(), nullable=False),
        sa.Column("pid", sa.Integer(), nullable=False),
        sa.Column("started", sa.String(), nullable=False),
        sa.Column("runs", sa.String(), nullable=False),
        sa.Column("places", sa.Integer(), nullable=False),
        sa.Column("beat", sa.BigInteger(), nullable=False),
        sa.Column("beat_at", sa.Double(), nullable=False),
        sa.Column("completed", sa.Integer(), nullable=False),
        sa.Column("total", sa.Integer(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_driver"),
        sa.ForeignKeyConstraint(["study_id"], ["study.id"], name="fk_driver_study_id", ondelete="CASCADE"),
    )
    op.create_index("ix_driver_study_id", "driver", ["study_id"])
    op.create_table(
        "stack",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("study_id", sa.Integer(), nullable=False),
        sa.Column("jobs", sa.String(), nullable=False),
        sa.Column("driver_id", sa.String()),
        sa.Column("step", sa.Integer(), nullable=False),
        sa.Column("records", sa.String()),
        sa.Column("lost", sa.String()),
        sa.PrimaryKeyConstraint("id", name="pk_stack"),
        sa.ForeignKeyConstraint(["study_id"], ["study.id"], name="fk_stack_study_id", ondelete="CASCADE"),
        sa.ForeignKeyConstraint(["driver_id"], ["driver.id"], name="fk_stack_driver_id", ondelete="SET NULL"),
    )
    op.create_index("ix_stack_study_id", "stack", ["study_id"])
    op.create_index("ix_stack_driver_id", "stack", ["driver_id"])


def downgrade() -> None:
    op.drop_table("stack")
    op.drop_table("driver")
