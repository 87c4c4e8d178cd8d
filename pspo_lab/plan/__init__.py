"""Will it fit, and how long will it take: plans by arithmetic."""
