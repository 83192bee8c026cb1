"""The command `vgr-trl`: one file per subcommand."""
