"""The rows of each table: the statements that read and write them."""
