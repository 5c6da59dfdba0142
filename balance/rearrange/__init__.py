"""Move items between ranks: who gets which, on which node, and the moving itself."""
