"""Alembic's door: runs the revisions on the connection, and in the transaction, that the store hands it."""

from alembic import context

from deltalab.store.models import Base

# Batches, because SQLite cannot alter a table in place.
context.configure(
    connection=context.config.attributes["connection"], target_metadata=Base.metadata, render_as_batch=True
)
with context.begin_transaction():
    context.run_migrations()
