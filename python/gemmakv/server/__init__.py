"""HTTP on one model: `gemmakv serve`. Needs `gemmakv[server]`."""
