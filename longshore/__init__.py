"""Longshore for programs: `longshore.client` trains a model command by command on a Longshore service."""
