"""What people read: tables, figures, texts and exports of what the analysis found. Nothing here decides a verdict."""
