"""Parts shared by several studies: workloads, links, failures, kills, and the programs jaxrec is compared with."""
