"""What a person sees: progress, tables and summaries. All that uses rich.

Knows results as plain data; knows neither options nor exit codes.
"""
