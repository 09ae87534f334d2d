"""The papers' tables and figures: what each consists of, and the runs behind it."""
