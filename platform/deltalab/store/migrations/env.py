"""The script that Alembic runs: it migrates on the connection, and in the transaction, that the store hands it."""

from alembic import context

from deltalab.store.models import Base

# Batches remake a table, since SQLite cannot alter one in place.
context.configure(
    connection=context.config.attributes["connection"], target_metadata=Base.metadata, render_as_batch=True
)
with context.begin_transaction():
    context.run_migrations()
