"""Settings of text, training and evaluation tasks, which the command line parses without torch."""
