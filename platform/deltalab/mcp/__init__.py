"""A server of the Model Context Protocol, by which programs that propose rules use the platform's commands."""
