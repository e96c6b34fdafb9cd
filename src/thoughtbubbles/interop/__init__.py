"""Integrations: this model in other libraries. Each file needs the library it is named after."""
