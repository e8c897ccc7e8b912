"""What the command line's subcommands do, one module each."""
