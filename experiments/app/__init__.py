"""What every command of the command line shares: parsing, composing, help, the terminal, progress bars."""
