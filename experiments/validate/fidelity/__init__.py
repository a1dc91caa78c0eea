"""How far apart a real run and a simulated one are: settings, errors, tables, reports."""
