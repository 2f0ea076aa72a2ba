"""The claims of the four papers and our own, a file each.

Names of arms are those of `clearhead reproduce`, and after them those of the committed records.
"""
