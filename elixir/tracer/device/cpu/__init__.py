"""Rules of the CPU: each can be checked byte for byte with a real run."""
