"""The figures with which LLM-42 (arXiv 2601.17768, SOSP 2026) argued, measured again for detgen.

Numbered as there: 4, the cost of row-invariant linear layers; 6, how long outputs stay consistent without
verification; 9, what a pass costs and what windows waste; 10, throughput over the share of verified requests; 13,
recomputation and throughput over windows and requests. `measure` measures, `draw` draws, `make` does both.
"""
