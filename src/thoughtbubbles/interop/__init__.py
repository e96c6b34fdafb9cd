"""Embassies: this model in other libraries' worlds. Each file needs the library it is named after."""
