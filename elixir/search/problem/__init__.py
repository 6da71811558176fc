"""The problem as pure data and bytes: packing, the packed step, memory, traffic. It knows no seconds."""
