"""What a newcomer runs: datasets and scripts written for this project."""
