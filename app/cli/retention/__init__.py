"""Commands that erase and delete runs, and those that keep runs from that."""
