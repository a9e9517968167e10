"""What a person sees: progress, tables and summaries. Everything that uses rich.

It takes results as plain data and knows neither options nor exit codes.
"""
