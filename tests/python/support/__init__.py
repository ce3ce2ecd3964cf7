"""What the tests share: tiny models, oracles, a fake hub, a screen."""
