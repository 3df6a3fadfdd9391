"""Every Temporal client and process: the web service, the command line, hosts, and the stack on one machine."""
