"""A program that waits to be ended."""

import time

if __name__ == "__main__":
    time.sleep(600)
