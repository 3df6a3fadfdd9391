"""What the store holds, what of it policies let go, and how that is deleted beside runs that go on."""
