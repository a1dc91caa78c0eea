"""Parts that all commands of the command line share: parsing, composing, help, terminal, progress bars."""
