"""What all jobs that write a model share: targets, the writer, results, and estimates."""
