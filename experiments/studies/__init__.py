"""What several studies share: their work, links, failures, kills, and the programs that they are compared with."""
