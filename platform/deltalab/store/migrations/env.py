"""The script that Alembic runs. It migrates on the connection that the store opened, within the store's transaction."""

from alembic import context

from deltalab.store.models import Base

# A batch remakes a table, since SQLite cannot alter a table in place.
context.configure(
    connection=context.config.attributes["connection"], target_metadata=Base.metadata, render_as_batch=True
)
with context.begin_transaction():
    context.run_migrations()
