"""What an RL run samples and grades by itself."""
