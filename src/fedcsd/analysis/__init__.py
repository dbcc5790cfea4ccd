"""What runs show: tables and figures."""
