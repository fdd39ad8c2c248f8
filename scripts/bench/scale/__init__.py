"""What grows with workers, rows, time and bytes. Each module is a subject, whose `measure` yields rows of one table."""
