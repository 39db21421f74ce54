"""HTTP in and out: everything untrusted from callers is parsed here, and every reply is written here."""
